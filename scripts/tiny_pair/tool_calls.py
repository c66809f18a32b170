"""A seeded generator of requests and the tool calls that answer them."""

import json
from collections.abc import Callable
from random import Random
from typing import Any

Arguments = dict[str, Any]

EUROPE = ("Paris", "Berlin", "London", "Madrid", "Vienna", "Oslo", "Dublin", "Lisbon", "Prague", "Warsaw")
OVERSEAS = ("Tokyo", "Sydney", "Toronto", "Boston", "Chicago", "Cairo", "Nairobi", "Lima", "Mumbai", "Seoul")
CITIES = (*EUROPE, *OVERSEAS)
PEOPLE = ("anna", "ben", "carla", "david", "elena", "frank", "grace", "jonas", "lucas", "maria", "nora")
SYMBOLS = ("AAPL", "MSFT", "NVDA", "AMZN", "GOOG", "TSLA", "INTC", "AMD", "IBM", "ORCL", "SAP", "ASML")
CURRENCIES = ("EUR", "USD", "GBP", "JPY", "CHF", "SEK", "NOK", "CAD", "AUD")
LANGUAGES = ("English", "German", "French", "Spanish", "Italian", "Polish", "Dutch", "Swedish", "Japanese")
FOLDERS = ("src", "tests", "docs", "scripts", "lib", "config", "data", "tools")
STEMS = ("main", "utils", "parser", "server", "client", "config", "models", "reader", "writer", "cache")
SUFFIXES = ("py", "md", "json", "toml", "txt", "yaml")
TABLES = {
    "users": ["id", "name", "email", "created_at"],
    "orders": ["id", "user_id", "total", "status"],
    "products": ["id", "title", "price", "stock"],
    "events": ["id", "kind", "time", "payload"],
}
TOPICS = (
    "speculative decoding",
    "binary search trees",
    "the history of the printing press",
    "python type hints",
    "how to bake bread",
    "renewable energy in Europe",
    "graph colouring",
    "unit testing",
    "garbage collection",
    "the rules of chess",
    "the largest lakes in the world",
    "how vaccines work",
)
MEETINGS = ("standup", "planning", "review", "retrospective", "interview", "workshop", "lunch", "demo")
CHORES = ("call the dentist", "water the plants", "pay the rent", "send the report", "back up the disk")
PHRASES = ("good morning", "thank you very much", "where is the station", "see you tomorrow")
COMMANDS = ("ls -la", "git status", "git log --oneline", "pytest -q", "df -h", "make test", "ruff check .")
PATTERNS = ("TODO", "def main", "import os", "class Config", "raise ValueError", "assert", "logger")


def _path(rng: Random) -> str:
    return f"{rng.choice(FOLDERS)}/{rng.choice(STEMS)}.{rng.choice(SUFFIXES)}"


def _date(rng: Random) -> str:
    return f"202{rng.randint(4, 7)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _time(rng: Random) -> str:
    return f"{rng.randint(8, 19):02d}:{rng.choice(('00', '15', '30', '45'))}"


def _email(rng: Random) -> str:
    return f"{rng.choice(PEOPLE)}@example.com"


def _weather(rng: Random) -> tuple[str, Arguments]:
    city, unit = rng.choice(CITIES), rng.choice(("celsius", "fahrenheit"))
    return f"What is the weather in {city}, in {unit}?", {"city": city, "unit": unit}


def _search(rng: Random) -> tuple[str, Arguments]:
    topic = rng.choice(TOPICS)
    return f"Search the web for {topic}.", {"query": topic, "max_results": rng.choice((3, 5, 10))}


def _read_file(rng: Random) -> tuple[str, Arguments]:
    path, start = _path(rng), rng.randint(1, 200)
    end = start + rng.choice((20, 50, 100))
    request = f"Show me lines {start} to {end} of {path}."
    return request, {"path": path, "start_line": start, "end_line": end}


def _list_directory(rng: Random) -> tuple[str, Arguments]:
    folder, recursive = rng.choice(FOLDERS), rng.random() < 0.5
    return f"Which files are in {folder}?", {"path": folder, "recursive": recursive}


def _grep(rng: Random) -> tuple[str, Arguments]:
    pattern, folder = rng.choice(PATTERNS), rng.choice(FOLDERS)
    arguments = {"pattern": pattern, "path": folder, "ignore_case": rng.random() < 0.5}
    return f"Find {pattern} in {folder}.", arguments


def _run_command(rng: Random) -> tuple[str, Arguments]:
    command = rng.choice(COMMANDS)
    arguments = {"command": command, "timeout_seconds": rng.choice((10, 30, 60, 120))}
    return f"Run {command} in the shell.", arguments


def _send_email(rng: Random) -> tuple[str, Arguments]:
    to, meeting, date = _email(rng), rng.choice(MEETINGS), _date(rng)
    request = f"Tell {to} that the {meeting} is on {date}."
    return request, {"to": to, "subject": f"The {meeting}", "body": f"The {meeting} is on {date}."}


def _create_event(rng: Random) -> tuple[str, Arguments]:
    title, date, time = rng.choice(MEETINGS), _date(rng), _time(rng)
    attendees = [_email(rng) for _ in range(rng.randint(1, 3))]
    arguments = {
        "title": title,
        "date": date,
        "start_time": time,
        "duration_minutes": rng.choice((15, 30, 45, 60)),
        "attendees": attendees,
    }
    return f"Plan a {title} on {date} at {time}.", arguments


def _query_database(rng: Random) -> tuple[str, Arguments]:
    table = rng.choice(list(TABLES))
    count = rng.choice((5, 10, 20, 50, 100))
    columns = TABLES[table][: rng.randint(2, 4)]
    arguments = {"table": table, "columns": columns, "limit": count, "order_by": "id"}
    return f"List {count} {table} from the database.", arguments


def _convert(rng: Random) -> tuple[str, Arguments]:
    source, target = rng.sample(CURRENCIES, 2)
    amount = rng.choice((10, 25, 50, 99, 100, 250, 1000))
    arguments = {"amount": amount, "from_currency": source, "to_currency": target}
    return f"How much is {amount} {source} in {target}?", arguments


def _translate(rng: Random) -> tuple[str, Arguments]:
    source, target = rng.sample(LANGUAGES, 2)
    phrase = rng.choice(PHRASES)
    arguments = {"text": phrase, "source_language": source, "target_language": target}
    return f"Translate {phrase} from {source} to {target}.", arguments


def _stock(rng: Random) -> tuple[str, Arguments]:
    symbol = rng.choice(SYMBOLS)
    return f"What is the price of {symbol}?", {"symbol": symbol, "currency": "USD"}


def _flight(rng: Random) -> tuple[str, Arguments]:
    origin, destination = rng.sample(CITIES, 2)
    date = _date(rng)
    arguments = {
        "origin": origin,
        "destination": destination,
        "departure_date": date,
        "passengers": rng.randint(1, 4),
        "cabin": rng.choice(("economy", "business")),
    }
    return f"Book a flight from {origin} to {destination} on {date}.", arguments


def _reminder(rng: Random) -> tuple[str, Arguments]:
    chore, date, time = rng.choice(CHORES), _date(rng), _time(rng)
    repeat = rng.choice(("never", "daily", "weekly"))
    arguments = {"text": chore, "date": date, "time": time, "repeat": repeat}
    return f"Remind me to {chore} on {date} at {time}.", arguments


TOOLS: dict[str, Callable[[Random], tuple[str, Arguments]]] = {
    "get_weather": _weather,
    "search_web": _search,
    "read_file": _read_file,
    "list_directory": _list_directory,
    "grep": _grep,
    "run_command": _run_command,
    "send_email": _send_email,
    "create_event": _create_event,
    "query_database": _query_database,
    "convert_currency": _convert,
    "translate_text": _translate,
    "get_stock_price": _stock,
    "book_flight": _flight,
    "set_reminder": _reminder,
}


def tool_document(rng: Random) -> str:
    """Return one document: a line that asks for something, and one or two calls that answer it."""
    requests, calls = [], []
    for _ in range(1 if rng.random() < 0.7 else 2):
        name = rng.choice(list(TOOLS))
        request, arguments = TOOLS[name](rng)
        requests.append(request)
        calls.append(f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>")
    return " ".join(requests) + "\n" + "\n".join(calls) + "\n"
