"""The HTTP API: everything the command line can do, for browsers, scripts and other languages.

    endpoints    a route is a typed function; requests are parsed and documented from its types
    routes/      the routes, by subject
    problems     errors as problem details (RFC 9457)
    openapi      the OpenAPI document
    app          the ASGI application
    server       the process

The API needs the extra `api`.
"""
