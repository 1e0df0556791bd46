"""The dashboard: pages for people under `/ui`, made on the server from what the routes of the API answer.

    pages/       one file for each subject: what is read, and which template shows it
    actions.py   what can be done from a page: routes of the API, sent by a form
    serving.py   who is let in by the cookie of a log-in, forms that only our pages may send, errors as pages
    session.py   the cookies
    visit.py     who looks at a page, and what they may do
    rendering.py templates; words.py says what stands in them
    charts.py, graph.py, gantt.py   what is drawn

A page asks the functions of `api/routes`, so there is one set of questions; what a scope may not do is not offered, and
is refused by the same checks as over the API. Nothing is loaded from another host, and no script or style stands in a
page itself.
"""
