"""Plain English prompts on nothing in particular: what a base model could do before it was fine-tuned.

MEASURED are answered in every evaluation of a real base, REHEARSED in training beside the feedback. No prompt
is in both lists: what training rehearsed would say nothing about what it kept.
"""

from __future__ import annotations

MEASURED = (
    "What is the capital of France?",
    "Name three fruits that are yellow.",
    "Write a polite reply to a neighbour who invites me to dinner. I cannot come.",
    "Why do leaves turn red in autumn?",
    "What is 7 plus 5?",
    "Summarise in one sentence: The museum opened in 1911. It was closed for ten years after a fire, and opened again "
    "last spring with a new wing for children.",
    "Explain to a child what a volcano is.",
    "How do I boil an egg?",
    "Give me two tips for a job interview.",
    "Who wrote Romeo and Juliet?",
    "Translate into Spanish: Good morning, my friend.",
    "What is the difference between a lake and a river?",
    "Write a short poem about the sea.",
    "I feel tired today. What can I do?",
    "Which is heavier, a kilogram of iron or two kilograms of feathers?",
    "List the days of the week.",
    "Rewrite this sentence in the past tense: She walks to school and meets her friends.",
    "What does a librarian do?",
    "Tell me a fact about elephants.",
    "Write the first two sentences of a story about a lost dog.",
    "Is it safe to eat raw potatoes?",
    "What should I pack for a weekend in the mountains?",
    "Thank you for your help!",
    "Describe the colour blue without using its name.",
)
"""Prompts of every evaluation."""

REHEARSED = (
    "What is the capital of Japan?",
    "Name four animals that can fly.",
    "Write a friendly message to a colleague who has a birthday today.",
    "Why is the sky dark at night?",
    "What is 9 minus 4?",
    "Summarise in one sentence: The bakery on our street closes at noon. It sells bread, rolls and two kinds of cake, "
    "and on Sundays people queue around the corner.",
    "Explain what a computer does to somebody who has never seen one.",
    "How do I make a cup of tea?",
    "Give me three tips for better sleep.",
    "Who painted the Mona Lisa?",
    "Translate into French: Where is the station?",
    "What is the difference between a cat and a tiger?",
    "Write a short poem about winter.",
    "I am nervous about my exam tomorrow. What would you advise?",
    "Which is faster, a bicycle or an aeroplane?",
    "List the four seasons.",
    "Correct the grammar of this sentence: He go to work by bus every days.",
    "What does a carpenter do?",
    "Tell me something interesting about the moon.",
    "Write the opening of a letter to my grandmother.",
    "Can I keep bananas in the fridge?",
    "What should I cook for four guests?",
    "Hello, how are you?",
    "Describe a forest after the rain.",
    "What are the main parts of a plant?",
    "How many minutes are in two hours?",
    "Suggest a name for a small cafe by the river.",
    "What happened in the year 1969?",
    "Write an email to ask for a day off.",
    "What is a synonym of happy?",
    "Explain how a bridge carries weight.",
    "What are the advantages of learning a second language?",
    "How can I save money every month?",
    "Write a sentence with the word umbrella.",
    "What is photosynthesis?",
    "Which countries border Germany?",
    "Give an example of a renewable source of energy.",
    "What is the opposite of difficult?",
    "Write a product description for a wooden chair.",
    "Why do we have leap years?",
    "How do I look after a house plant?",
    "Tell me a joke.",
    "What is the boiling point of water?",
    "Plan a simple workout for the morning.",
    "What is democracy?",
    "Write a headline for an article about clean rivers.",
    "Why do cats purr?",
    "Put these words in alphabetical order: pear, apple, orange, lemon.",
)
"""Prompts that training rehearses."""
