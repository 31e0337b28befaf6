"""What the commands measure, and how they print it."""
