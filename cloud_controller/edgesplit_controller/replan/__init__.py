"""Plans that grow old: what devices measured beside what their plan assumed, and another table where that pays."""
