"""Tasks as users submit them."""
