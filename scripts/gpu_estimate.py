def print_estimates(a,b): pass
