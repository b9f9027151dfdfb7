"""Prompts for the default pair: sums in English, and questions in Spanish. Made of templates, so
that there are as many as one likes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from draftwell.components.prompts.prompt import Prompt

SUMS = (
    (
        "{name} has {a} {things} and buys {b} more boxes with {c} {things} in each. How many "
        "{things} does {name} have now?"
    ),
    (
        "A shop sells {things} for {a} dollars each. {name} buys {b} of them and pays with a "
        "{big} dollar note. How much change is there?"
    ),
    (
        "{name} reads {a} pages a day for {b} days, and {c} pages on the last day. How many "
        "pages is that altogether?"
    ),
    (
        "There are {a} rows of {b} seats in a hall. {c} seats are broken. How many people can "
        "sit down?"
    ),
    (
        "{name} walks {a} km on Monday and twice as far on Tuesday. On Wednesday {name} walks "
        "{b} km. How far is that in total?"
    ),
    (
        "A train leaves with {big} passengers. At the first stop {a} get off and {b} get on. "
        "How many passengers are on the train?"
    ),
    (
        "{name} shares {big} {things} equally among {c} friends. How many does each friend "
        "get, and how many are left over?"
    ),
    "If {c} {things} cost {a} dollars, how much do {b} times as many {things} cost?",
    (
        "{name} earns {a} dollars an hour and works {b} hours a week. How much does {name} "
        "earn in {c} weeks?"
    ),
    (
        "A tank holds {big} litres. Every minute {c} litres flow out. How many litres are left "
        "after {b} minutes?"
    ),
)
QUESTIONS = (
    "¿Cuál es la historia de {place} y por qué es importante para {people}?",
    "Escribe una carta corta a {people} para contarles cómo fue tu viaje a {place}.",
    "Explica con palabras sencillas qué es {thing} y para qué sirve.",
    "¿Qué consejos darías a {people} que quieren aprender sobre {thing}?",
    "Describe un día de mercado en {place}: los olores, los colores y la gente.",
    "¿Qué diferencias hay entre vivir en {place} y vivir en el campo?",
    "Escribe un cuento para {people} en el que aparezca {thing}.",
    "Resume en tres frases lo que {people} deberían saber sobre {thing}.",
    "¿Por qué {people} visitan {place} en verano? Da tres razones.",
    "Imagina una conversación entre dos vecinos de {place} sobre {thing}.",
)
NAMES = ("Anna", "Ben", "Carla", "David", "Elena", "Farid", "Grace", "Hugo", "Iris", "Jonas")
THINGS = (
    "apples",
    "pencils",
    "marbles",
    "stamps",
    "books",
    "shells",
    "cards",
    "eggs",
    "coins",
    "buttons",
)
PLACES = (
    "Sevilla",
    "Lima",
    "Bogotá",
    "la Ciudad de México",
    "Buenos Aires",
    "Barcelona",
    "Quito",
    "La Habana",
    "Montevideo",
    "Granada",
)
PEOPLE = (
    "los niños",
    "los turistas",
    "los estudiantes",
    "tus abuelos",
    "los médicos",
    "las familias",
    "los músicos",
    "los jóvenes",
)
TOPICS = (
    "la energía solar",
    "el reciclaje",
    "la fotosíntesis",
    "el ajedrez",
    "la cocina andina",
    "el flamenco",
    "la luna",
    "el café",
    "la inteligencia artificial",
    "el baloncesto",
)


def maths(count: int, seed: int) -> list[Prompt]:
    """Different sums in words."""
    return _made(
        count,
        seed,
        "maths",
        SUMS,
        lambda random: {
            "name": random.choice(NAMES),
            "things": random.choice(THINGS),
            "a": random.integers(12, 90),
            "b": random.integers(3, 25),
            "c": random.integers(2, 12),
            "big": 10 * random.integers(20, 90),
        },
    )


def spanish(count: int, seed: int) -> list[Prompt]:
    """Different questions in Spanish."""
    return _made(
        count,
        seed,
        "spanish",
        QUESTIONS,
        lambda random: {
            "place": random.choice(PLACES),
            "people": random.choice(PEOPLE),
            "thing": random.choice(TOPICS),
        },
    )


def _made(
    count: int,
    seed: int,
    task: str,
    templates: Sequence[str],
    fill: Callable[[np.random.Generator], dict[str, Any]],
) -> list[Prompt]:
    random = np.random.default_rng([seed, len(task)])
    found: dict[str, None] = {}
    while len(found) < count:
        found[str(random.choice(templates)).format(**fill(random))] = None
    return [Prompt(f"{task}/{seed}/{i}", task, [text]) for i, text in enumerate(found)]
