"""Serves a model over HTTP in the form of OpenAI's API, which many clients know. It needs the extra `serve`."""
