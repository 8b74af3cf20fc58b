"""One microbatch on its way to the next stage."""
