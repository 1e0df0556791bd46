"""The HTTP API: all that the command line can do, for browsers, scripts and other languages.

    endpoints    a route is a function with types, from which requests are read and its documentation is made
    routes/      the routes, by subject
    problems     what went wrong, as RFC 9457 has it
    openapi      the document of it all
    app          the ASGI application
    server       the process

It needs the extra `api`.
"""
