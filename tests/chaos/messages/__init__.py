"""Kill workers, leaders and connections while clients send messages to workflows as code, and check each message."""
