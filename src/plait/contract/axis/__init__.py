"""What axes of the mesh other than tp add to a step."""
