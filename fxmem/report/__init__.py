"""What people and tools read: texts, tables, pictures, traces."""
