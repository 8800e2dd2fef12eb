"""The post-mortem of an incident: one page from which an operator sees what happened, why, and what it cost.

model.py       what the page says
timeline.py    the course of the incident, from the records of the log
evidence.py    what the evidence says, for its reader
counts.py      why tasks have as many workers as the plan gives them, and not more or fewer
alike.py       earlier incidents that are like it
words.py       what the words of a log mean
gather.py      reads what the page needs
page.py        the page as HTML or Markdown
"""
