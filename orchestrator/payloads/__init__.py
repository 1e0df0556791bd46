"""Storage for payloads too large for a row or a message: a folder, a bucket, or any fsspec file system."""
