"""Text to tokens and back: tokenizer, stop strings, chat templates, the routing of a streamed reply.

Imports nothing of bytefloor but its errors, so that a server or a test can use it without a model or a GPU.
"""
