"""The Triton kernels: attention over pages, merge of split keys, quantizing cache write."""
