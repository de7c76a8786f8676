"""When a job spends its extra time: slower while energy is dirty or dear, faster while it is not. Pure."""
