"""The wordings of questions about videos."""

from __future__ import annotations

from training.tasks.phrasing import Phrases

DIRECTION = Phrases(
    "Which way does it move?",
    "In which direction does it move?",
    "Where does it go?",
    "Which direction does the {shape} move in?",
    "Which way does the {shape} move?",
    "In which direction is the {shape} moving?",
    "Where does the {shape} go?",
    "What is the direction of the motion?",
    "Where is the {shape} going?",
    "Which way is it going?",
    "Direction of the motion?",
)
HAPPENS = Phrases(
    "What happens?",
    "What happens in the video?",
    "What do you see in the video?",
    "Describe the video.",
    "What is going on here?",
    "What does the video show?",
    "Tell me what happens.",
    "What is happening?",
)
IS_MOVING = Phrases(
    "Does it move?",
    "Is it moving?",
    "Does the {shape} move?",
    "Is the {shape} moving?",
    "Does anything move?",
    "Is there any motion?",
)
MOVES_THERE = Phrases(
    "Does it move {direction}?",
    "Does the {shape} move {direction}?",
    "Is it moving {direction}?",
    "Is the {shape} moving {direction}?",
    "Does it go {direction}?",
    "Yes or no: does it move {direction}?",
)
FIRST = Phrases(
    "Which thing came first?",
    "What came first?",
    "What appears first?",
    "Which thing do you see first?",
    "What was shown first?",
    "What is at the beginning of the video?",
)
LAST = Phrases(
    "Which thing came last?",
    "What came last?",
    "What appears last?",
    "Which thing do you see last?",
    "What was shown last?",
    "What is at the end of the video?",
)
NEW_COLOR = Phrases(
    "Which color does it become?",
    "What color does it turn into?",
    "What is its color at the end?",
    "What color is the {shape} at the end?",
    "Which color does the {shape} change to?",
    "Into which color does it change?",
)
OLD_COLOR = Phrases(
    "Which color was it first?",
    "What color was it at the beginning?",
    "What is its color at the start?",
    "What color is the {shape} at the start?",
    "Which color did the {shape} have first?",
    "What was its first color?",
)
SIZE_CHANGE = Phrases(
    "Does it grow or shrink?",
    "Does it get bigger or smaller?",
    "Does the {shape} grow or shrink?",
    "Does the {shape} get bigger or smaller?",
    "How does its size change?",
    "What happens to its size?",
)
TURNS = Phrases(
    "Does it turn?",
    "Does it rotate?",
    "Is it turning?",
    "Does the {shape} rotate?",
    "Is the {shape} turning?",
    "Does the {shape} turn?",
)
COUNT_END = Phrases(
    "How many things are there at the end?",
    "How many things appear?",
    "How many things do you see at the end?",
    "Count the things at the end.",
    "How many things come?",
    "How many shapes appear in the video?",
)
