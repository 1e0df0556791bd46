"""The dashboard: pages for people under `/ui`, made on the server from what the routes of the API answer.

    pages/       one file for each subject: what is read, and which template shows it
    paths.py     all pages, and the actions: routes of the API, sent by a form
    serving.py   lets in by the cookie of a log-in, takes forms of our pages only, shows errors as pages
    session.py   log-ins and cookies
    rendering.py templates for a visitor; words.py has their filters
    charts.py, graph.py, gantt.py   what is drawn

A page asks the functions of `api/routes`, so there is one set of questions; what a scope may not do is not offered, and
is refused by the same checks as over the API. Nothing is loaded from another host, and no script or style stands in a
page itself.
"""
