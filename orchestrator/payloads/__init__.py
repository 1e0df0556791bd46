"""Payloads that are too large for a row or a message: kept in a folder, a bucket, or wherever fsspec reaches."""
