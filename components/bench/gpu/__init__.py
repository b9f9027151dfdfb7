"""What is measured on a GPU: the card itself, parts in processes of their own, the file of their
results, and the table of docs/gpu.md."""
