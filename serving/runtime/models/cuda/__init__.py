"""Models whose forward passes are captured as CUDA graphs, by kernels that give a token the same
numbers in any company."""
