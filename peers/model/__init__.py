"""swarm-model: takes models of Hugging Face in and gives them out."""
