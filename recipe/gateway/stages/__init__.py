"""What a request passes on its way to the model server."""
