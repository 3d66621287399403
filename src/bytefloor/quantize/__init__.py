"""Making one model file out of another: which tensor gets which format, and writing them one after another."""
