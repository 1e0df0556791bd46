"""The one leading scheduler: it applies what workers report and decides what happens next."""
