"""Prompts in the style of the training text, by kind."""

_FUNCTIONS = (
    "Return the number of items in the queue.\n```python\ndef qsize(self):\n    ",
    "Read a line from the file.\n```python\ndef readline(self, size=-1):\n    ",
    "Close the connection to the server.\n```python\ndef close(self):\n    try:\n",
    "Return a list of the names in the archive.\n```python\ndef namelist(self):\n",
    "Set the value of an option in a section.\n```python\ndef set(self, section, option, value=None):\n",
    "Parse the header and return the fields.\n```python\ndef parse_header(line):\n    ",
    "```python\ndef __init__(self, name, value=None, default=None):\n    self.name = name\n",
    "```python\ndef __eq__(self, other):\n    if not isinstance(other, ",
    "```python\ndef __repr__(self):\n    return ",
    "```python\ndef get(self, key, default=None):\n    try:\n        return ",
    "```python\ndef write(self, data):\n    if self.closed:\n        raise ",
    "```python\ndef main():\n    import argparse\n    parser = argparse.ArgumentParser()\n",
    "```python\ndef copyfile(src, dst, *, follow_symlinks=True):\n    with open(",
    "```python\ndef add_header(self, key, val):\n    self.headers[key",
    "```python\nasync def wait(self, timeout=None):\n    while not self._",
    "Join two paths.\n```python\ndef join(path, *paths):\n    result = []\n    for part in paths:\n",
)

_SENTENCES = (
    "Return a copy of the string with all the characters converted to",
    "This module provides a simple way to read and write",
    "The following table lists the attributes that are defined for",
    "If the argument is omitted or None, the current",
    "The default implementation raises an exception when the",
    "Note that the order of the elements in the result is",
    "Redistribution and use in source and binary forms, with or without",
    "A class that implements this method should also define",
    "When a function is called, the arguments are evaluated and",
    "Compute the mean of the array along the given axis. The result",
    "The expression is evaluated once; it should yield an iterable object. An",
    "Each thread has its own copy of the state, so that",
    "This function is useful for testing whether two arrays are",
    "The license applies to all copies of the software and",
    "Names refer to objects. Names are introduced by",
    "An instance of this class represents a single connection to the",
)

_REQUESTS = (
    "What is the weather in Paris, in celsius?",
    "Search the web for binary search trees.",
    "Show me lines 10 to 60 of src/main.py.",
    "Which files are in docs?",
    "Find TODO in scripts.",
    "Run git status in the shell.",
    "Tell anna@example.com that the review is on 2026-03-14.",
    "Plan a workshop on 2025-11-05 at 09:30.",
    "List 20 orders from the database.",
    "How much is 250 EUR in USD?",
    "Translate good morning from English to German.",
    "What is the price of NVDA?",
    "Book a flight from Oslo to Lisbon on 2026-07-21.",
    "Remind me to water the plants on 2025-06-02 at 18:00.",
    "What is the weather in Tokyo, in fahrenheit?",
    "Find class Config in src. List 5 users from the database.",
)

PROMPTS: dict[str, list[str]] = {
    "code": [*_FUNCTIONS],
    "prose": [*_SENTENCES],
    "tool": [f'{request}\n<tool_call>\n{{"name": "' for request in _REQUESTS],
}
