"""The shares of several processes that save the state of a large model together."""
