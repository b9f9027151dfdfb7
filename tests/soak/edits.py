"""Four edits of a file, as an editor asks a model for them: each an instruction and the file."""

from __future__ import annotations

ORDERS = '''"""Orders of a shop: what they cost, and when they are sent."""

from dataclasses import dataclass, field
from datetime import date, timedelta


@dataclass
class Item:
    name: str
    price: float
    count: int = 1


@dataclass
class Order:
    customer: str
    items: list[Item] = field(default_factory=list)
    paid: bool = False

    def add(self, item: Item) -> None:
        for known in self.items:
            if known.name == item.name:
                known.count += item.count
                return
        self.items.append(item)

    def total(self) -> float:
        result = 0.0
        for item in self.items:
            result += item.price * item.count
        return result

    def with_tax(self, rate: float) -> float:
        result = self.total()
        result += result * rate
        return round(result, 2)

    def pay(self, amount: float) -> None:
        if amount < self.with_tax(0.2):
            raise ValueError("this does not pay the order")
        self.paid = True


def sent_on(order: Order, today: date) -> date:
    if not order.paid:
        raise ValueError("the order is not paid")
    days = 1 if len(order.items) < 5 else 3
    result = today + timedelta(days=days)
    while result.weekday() >= 5:
        result += timedelta(days=1)
    return result


def report(orders: list[Order]) -> str:
    lines = []
    for order in orders:
        state = "paid" if order.paid else "open"
        lines.append(f"{order.customer}: {order.total():.2f} ({state})")
    return "\\n".join(lines)
'''

READER = '''"""Reads readings of sensors from lines of text."""

import statistics


class Reading:
    def __init__(self, sensor: str, second: int, value: float):
        self.sensor = sensor
        self.second = second
        self.value = value


def read_line(line: str) -> Reading:
    sensor, second, value = line.strip().split(",")
    return Reading(sensor, int(second), float(value))


def read_file(path: str) -> list[Reading]:
    readings = []
    with open(path) as lines:
        for line in lines:
            if line.strip() and not line.startswith("#"):
                readings.append(read_line(line))
    return readings


def by_sensor(readings: list[Reading]) -> dict[str, list[Reading]]:
    groups = {}
    for reading in readings:
        groups.setdefault(reading.sensor, []).append(reading)
    return groups


def middle(readings: list[Reading]) -> float:
    return statistics.median(reading.value for reading in readings)


def jumps(readings: list[Reading], limit: float) -> list[int]:
    seconds = []
    for before, after in zip(readings, readings[1:]):
        if abs(after.value - before.value) > limit:
            seconds.append(after.second)
    return seconds


def main(path: str) -> None:
    groups = by_sensor(read_file(path))
    for sensor in sorted(groups):
        readings = groups[sensor]
        print(sensor, len(readings), middle(readings), jumps(readings, 5.0))
'''

MIDDLE = "def middle(readings: list[Reading]) -> float:\n"
EDITS = {
    "rename a variable": (
        "Rename the variable `result` to `amount` in this file.",
        ORDERS,
        "result",
        "amount",
    ),
    "add a docstring": (
        "Add a docstring to the function `middle` in this file.",
        READER,
        MIDDLE,
        MIDDLE + '    """The value in the middle."""\n',
    ),
    "change a constant": (
        "Change the tax rate 0.2 to 0.19 in this file.",
        ORDERS,
        "with_tax(0.2)",
        "with_tax(0.19)",
    ),
    "rename a function": (
        "Rename the function `jumps` to `sudden_changes` in this file.",
        READER,
        "jumps",
        "sudden_changes",
    ),
}
"""Name → what is asked, the file as it is before the edit, and what is to be replaced by what."""
