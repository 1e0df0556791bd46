"""The dashboard: HTML pages under `/ui`, rendered on the server from the results of the API's routes.

    pages/       one file for each subject: its routes, queries and templates
    paths.py     all pages, and the actions: API routes that forms call
    serving.py   authenticates by session cookie, checks forms, shows errors as pages
    session.py   sessions and cookies
    rendering.py renders templates for a visitor; words.py has their filters
    charts.py, graph.py, gantt.py   drawings

Pages call the functions of `api/routes`, so each query exists once. Actions that the visitor's scope forbids are not
offered, and the API's checks reject them. Pages load nothing from other hosts, and contain no inline scripts or styles.
"""
