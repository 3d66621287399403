"""Where the bytes are: readers and writers of model files. No arithmetic on weights."""
