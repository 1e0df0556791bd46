"""The tasks of an application as services over HTTP: `POST /exec/<task>`."""
