"""What is in a Hugging Face directory: names, tensors and the files beside them."""
