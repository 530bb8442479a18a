"""A text of our own to measure models with, where a user gives none: plain English of a few hundred tokens."""

TEXT = """\
The old mill stands where the valley narrows, a day's walk below the lake. Nobody remembers who built the first weir, \
but the stones under the water are cut in a way that masons gave up two hundred years ago. A wooden channel, the \
headrace, leaves the river above the weir and follows the slope for half a mile, losing so little height that a \
visitor would swear it runs uphill. At its end the water drops twelve feet onto the wheel.

The miller, a careful woman of sixty, explained it to me like this. "A river gives you all its water at once or none \
of it. The pond is there so that I need not care. At night it fills, by day I draw it down, and the wheel turns at \
the same speed in April and in August. The art is never to let it run dry, and never to let it spill, because what \
spills is flour I did not grind."

I asked what she did in a drought. She laughed. "Then I grind slowly. People think a slow mill is a poor mill. But \
the stones must be fed evenly; if the grain comes in bursts, the flour is burnt one minute and coarse the next. Give \
me a thin stream that never stops, and by evening there are more sacks than after a day of starts and stops."

In the winter of 1838 the ice took the sluice gate, two of the paddles and most of the lower floor. Her great-great-\
grandfather wrote the cost of the repairs in the back of a hymn book: 14 oak beams at 3 shillings, 220 nails, nine \
days' work for two carpenters, and a barrel of beer, which was the largest single item. He also drew a plan of the \
wheel, with 36 buckets instead of 32, and noted that it turned more smoothly but gave no more power, "the water being \
what it is".

There are three kinds of wheel. An undershot wheel sits in the stream and is pushed by it; it is cheap, and wastes \
two thirds of what it is given. A breast wheel takes the water at the height of its axle. An overshot wheel, like \
this one, is filled from above and turned by weight alone, and if it is well made it keeps more than four fifths of \
the power. Why, then, did anyone build the other kinds? Because a fall of twelve feet has to be found or made, and \
making one means digging, and digging means money.

Today the mill grinds on two days a week. On the others the wheel drives a small generator, which lights the house, \
the yard and the bakery next door. A notice beside the door lists the rules for visitors: do not touch the belts; do \
not feed the ducks; do not ask the miller whether she would rather have an engine. Under it, in another hand, someone \
has added: "She would not."
"""
