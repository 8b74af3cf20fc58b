"""What a member does in an attempt: it freezes its contribution, exchanges it with the others, and keeps the result."""
