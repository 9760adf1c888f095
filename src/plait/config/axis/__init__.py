"""What axes of the mesh need to be told beside their degrees."""
