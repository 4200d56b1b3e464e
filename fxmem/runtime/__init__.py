"""What an emitted graph calls."""
