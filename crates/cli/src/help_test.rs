//! Snapshots of the help of every command.

use clap::{Command, CommandFactory};

use crate::Arguments;

/// Every command with the words that call it, subcommands behind the command they belong to.
fn commands() -> Vec<(String, Command)> {
    fn walk(command: &Command, path: String, found: &mut Vec<(String, Command)>) {
        for child in command.get_subcommands() {
            if child.get_name() != "help" {
                walk(child, format!("{path} {}", child.get_name()), found);
            }
        }
        found.push((path, command.clone()));
    }
    let mut root = Arguments::command().term_width(100);
    root.build();
    let mut found = Vec::new();
    walk(&root, root.get_name().to_owned(), &mut found);
    found.sort_by(|(one, _), (other, _)| one.cmp(other));
    found
}

#[test]
fn help_is_as_it_was() {
    let help: String = commands()
        .into_iter()
        .map(|(path, mut command)| format!("$ {path} --help\n{}\n", command.render_long_help()))
        .collect();
    insta::assert_snapshot!("help", help);
}

#[test]
fn every_command_has_an_example() {
    for (path, command) in commands() {
        let is_group = command.has_subcommands() && path != "powerinfer";
        let after = command.get_after_help().map(ToString::to_string);
        assert!(
            is_group || after.is_some_and(|after| after.contains("Example")),
            "{path}"
        );
    }
}
