"""What a request passes on its way to the model server, one file a stage."""
