"""The wordings of questions about things in a picture."""

from __future__ import annotations

from training.tasks.phrasing import Phrases

WHAT = Phrases(
    "What is this?",
    "What's this?",
    "What do you see?",
    "What is in the picture?",
    "What is in this picture?",
    "What can you see?",
    "What does the picture show?",
    "What is shown here?",
    "What is that?",
    "Describe the picture.",
    "Describe this image.",
    "What's in this image?",
    "Name what you see.",
    "What is it?",
    "Look at this. What is it?",
)
LIST = Phrases(
    "What do you see?",
    "What is in the picture?",
    "What is in this picture?",
    "Which things are there?",
    "List all things from left to right.",
    "What can you see?",
    "Name all the things.",
    "Which shapes do you see?",
    "Describe the picture.",
    "Describe this image.",
    "What's in this image?",
    "What does the picture show?",
    "Name everything you see.",
)
COLOR_OF = Phrases(
    "What color is the {thing}?",
    "Which color is the {thing}?",
    "What is the color of the {thing}?",
    "What color does the {thing} have?",
    "Name the color of the {thing}.",
    "The {thing} has which color?",
    "Tell me the color of the {thing}.",
    "What's the color of the {thing}?",
    "In which color is the {thing}?",
    "Color of the {thing}?",
)
COLOR_OF_IT = Phrases(
    "What color is it?",
    "Which color is it?",
    "What is its color?",
    "What color is this?",
    "Name the color.",
    "What color does it have?",
    "Which color do you see?",
    "Tell me its color.",
    "What color is the thing?",
    "What color is the shape?",
    "Color?",
)
SHAPE_OF = Phrases(
    "What shape is the {color} thing?",
    "Which shape is {color}?",
    "What shape is {color}?",
    "What is the shape of the {color} thing?",
    "What shape does the {color} object have?",
    "Which {color} shape is there?",
    "What {color} shape do you see?",
    "Name the shape of the {color} thing.",
    "What is the {color} thing?",
    "Which shape has the color {color}?",
)
SHAPE_OF_IT = Phrases(
    "What shape is it?",
    "Which shape is it?",
    "What is its shape?",
    "What shape is this?",
    "Name the shape.",
    "Which shape do you see?",
    "What shape does it have?",
    "Tell me its shape.",
    "What shape is the thing?",
    "Shape?",
)
COUNT = Phrases(
    "How many {things} are there?",
    "How many {things} do you see?",
    "How many {things} are in the picture?",
    "Count the {things}.",
    "What is the number of {things}?",
    "How many {things}?",
    "Please count the {things}.",
    "How many {things} can you see?",
    "How many {things} can you count?",
    "Number of {things}?",
    "Tell me how many {things} there are.",
)
WHERE = Phrases(
    "Where is the {thing}?",
    "Where's the {thing}?",
    "Where is the {thing} in the picture?",
    "What is the position of the {thing}?",
    "In which part of the picture is the {thing}?",
    "Where can I find the {thing}?",
    "Where do you see the {thing}?",
    "Find the {thing}.",
    "In which corner or part is the {thing}?",
    "Tell me where the {thing} is.",
    "Locate the {thing}.",
)
WHAT_AT = Phrases(
    "What is {place}?",
    "What do you see {place}?",
    "What's {place}?",
    "Which thing is {place}?",
    "What can you see {place}?",
    "What is there {place}?",
    "Name the thing {place}.",
    "Look {place}. What is there?",
)
IS_RELATED = Phrases(
    "Is the {one} {relation} the {other}?",
    "Is the {one} {relation} the {other} in the picture?",
    "Do you see the {one} {relation} the {other}?",
    "Can you see the {one} {relation} the {other}?",
    "Look: is the {one} {relation} the {other}?",
    "Yes or no: is the {one} {relation} the {other}?",
    "Is the {one} placed {relation} the {other}?",
    "Does the {one} lie {relation} the {other}?",
)
WHAT_IS_RELATED = Phrases(
    "What is {relation} the {other}?",
    "What's {relation} the {other}?",
    "Which thing is {relation} the {other}?",
    "What do you see {relation} the {other}?",
    "What can you see {relation} the {other}?",
    "What lies {relation} the {other}?",
    "Name the thing {relation} the {other}.",
)
WHERE_RELATED = Phrases(
    "Where is the {one} relative to the {other}?",
    "Where is the {one} compared to the {other}?",
    "Seen from the {other}, where is the {one}?",
    "Where is the {one}, seen from the {other}?",
    "How is the {one} placed relative to the {other}?",
    "On which side of the {other} is the {one}?",
    "Is the {one} left of, right of, above or below the {other}?",
)
EXISTS = Phrases(
    "Is there {thing}?",
    "Do you see {thing}?",
    "Can you see {thing}?",
    "Is there {thing} in the picture?",
    "Does the picture show {thing}?",
    "Is {thing} in this picture?",
    "Is {thing} shown?",
    "Yes or no: is there {thing}?",
    "Can you find {thing}?",
    "Does the image contain {thing}?",
)
BIGGEST = Phrases(
    "What is the biggest thing?",
    "Which thing is the biggest?",
    "Which thing is the largest?",
    "Which shape is the biggest?",
    "What's the largest thing?",
    "Name the biggest thing.",
    "Which one is the biggest?",
    "Which one is larger than the others?",
)
SMALLEST = Phrases(
    "What is the smallest thing?",
    "Which thing is the smallest?",
    "Which thing is the tiniest?",
    "Which shape is the smallest?",
    "What's the smallest thing?",
    "Name the smallest thing.",
    "Which one is the smallest?",
    "Which one is smaller than the others?",
)
SAME_COLOR = Phrases(
    "Do the {one} and the {other} have the same color?",
    "Are the {one} and the {other} the same color?",
    "Is the {one} the same color as the {other}?",
    "Does the {one} have the same color as the {other}?",
    "Have the {one} and the {other} the same color?",
    "Same color: the {one} and the {other}?",
)
IS_COLOR = Phrases(
    "Is the {thing} {color}?",
    "Is the color of the {thing} {color}?",
    "Is that {thing} {color}?",
    "Do you see that the {thing} is {color}?",
    "Does the {thing} have the color {color}?",
    "Yes or no: is the {thing} {color}?",
)
UNKNOWABLE = Phrases(
    "How heavy is it?",
    "Who made this picture?",
    "Who drew this?",
    "When was this picture made?",
    "What does it smell like?",
    "How much does it cost?",
    "Where was this picture taken?",
    "What is behind the picture?",
    "What is it made of?",
    "What sound does it make?",
    "How old is it?",
    "Is it warm or cold?",
    "What happens next?",
    "Who owns this?",
    "What is outside of the picture?",
    "What was here yesterday?",
    "Is it soft or hard?",
    "What is the name of the artist?",
)
# Of each cell: two that may also mean the whole side, then two that can only mean the cell.
PLACES = (
    ("in the top left", "in the upper left", "at the top left", "in the top left corner"),
    ("at the top", "up at the top", "at the top middle", "at the top center"),
    ("in the top right", "in the upper right", "at the top right", "in the top right corner"),
    ("at the left", "on the left", "at the middle left", "in the middle of the left side"),
    ("in the center", "in the middle", "at the center", "in the middle of the picture"),
    ("at the right", "on the right", "at the middle right", "in the middle of the right side"),
    ("in the bottom left", "in the lower left", "at the bottom left", "in the bottom left corner"),
    ("at the bottom", "down at the bottom", "at the bottom middle", "at the bottom center"),
    (
        "in the bottom right",
        "in the lower right",
        "at the bottom right",
        "in the lower right corner",
    ),
)
RELATIONS = {
    "left": ("left of", "to the left of", "on the left of"),
    "right": ("right of", "to the right of", "on the right of"),
    "above": ("above", "over", "higher than"),
    "below": ("below", "under", "lower than"),
}
READ = Phrases(
    "What does it say?",
    "Read the text.",
    "What is written here?",
    "What does the picture say?",
    "What text do you see?",
    "Read this.",
    "What is the text?",
    "Which word is this?",
    "What word do you see?",
    "Read it to me.",
    "What does the sign say?",
    "Read the word.",
    "Write down the text in the picture.",
    "Please read this.",
    "Can you read this?",
)
READ_NUMBER = Phrases(
    "What does it say?",
    "Read the number.",
    "Which number is this?",
    "What number do you see?",
    "What is the number?",
    "Read this.",
    "Read the digits.",
    "What number is written here?",
    "What is written here?",
    "What does the picture say?",
    "Read the text.",
    "What number is shown?",
    "What does the sign say?",
    "Please read the number.",
)
READ_LINE = Phrases(
    "Read the {place} line.",
    "What does the {place} line say?",
    "What is written in the {place} line?",
    "What is the {place} line?",
    "What text is in the {place} line?",
    "The {place} line?",
)
READ_ALL = Phrases(
    "Read everything.",
    "Read all lines.",
    "What does it say?",
    "Read the text.",
    "What is written here?",
    "Read the whole text.",
    "Write down the text in the picture.",
)
NUM_LETTERS = Phrases(
    "How many letters does the word have?",
    "How many letters?",
    "How many letters are there?",
    "Count the letters.",
    "How many letters do you see?",
    "How long is the word?",
)
NUM_DIGITS = Phrases(
    "How many digits does the number have?",
    "How many digits?",
    "How many digits are there?",
    "Count the digits.",
    "How many digits do you see?",
)
FIRST_LETTER = Phrases(
    "What is the first letter?",
    "Which letter comes first?",
    "Name the first letter.",
    "What letter does it start with?",
    "With which letter does the word begin?",
    "First letter?",
)
LAST_LETTER = Phrases(
    "What is the last letter?",
    "Which letter comes last?",
    "Name the last letter.",
    "What letter does it end with?",
    "With which letter does the word end?",
    "Last letter?",
)
TEXT_COLOR = Phrases(
    "What color is the text?",
    "Which color do the letters have?",
    "What is the color of the writing?",
    "In which color is it written?",
    "What color are the letters?",
    "What color is the writing?",
)
