"""Reading and writing of Hugging Face folders."""
