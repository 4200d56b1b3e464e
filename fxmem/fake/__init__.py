"""User code on FakeTensors, leaving no trace."""
