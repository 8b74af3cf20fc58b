"""What a group agrees on, as pure state machines and arithmetic: no network, no tensors. The lowest floor."""
