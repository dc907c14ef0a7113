"""How a plan looks: as text, as HTML, as a table of pandas', as a picture; and the labels of its ranks."""
