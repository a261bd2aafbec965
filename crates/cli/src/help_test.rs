//! Snapshots of the help of every command.

use clap::{Command, CommandFactory};

use crate::{Arguments, command_lines::command_lines};

/// Columns of the help.
const WIDTH: usize = 100;

/// Every command with the words that call it, subcommands after the command they belong to.
fn commands() -> Vec<(String, Command)> {
    fn walk(command: &Command, path: String, found: &mut Vec<(String, Command)>) {
        for child in command.get_subcommands() {
            if child.get_name() != "help" {
                walk(child, format!("{path} {}", child.get_name()), found);
            }
        }
        found.push((path, command.clone()));
    }
    let mut root = Arguments::command().term_width(WIDTH);
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

/// Calls of this program in `text`.
fn calls(text: &str) -> Vec<String> {
    let parts = command_lines(text).into_iter().flat_map(|line| {
        let parts = line.split("&&").flat_map(|part| part.split(['|', '>']));
        parts.map(|part| part.trim().to_owned()).collect::<Vec<_>>()
    });
    parts
        .filter(|part| part.starts_with("powerinfer "))
        .collect()
}

/// The words of a command line, as a shell separates them.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut is_quoted = false;
    for c in line.chars() {
        match c {
            '\'' => is_quoted = !is_quoted,
            ' ' if !is_quoted => words.push(String::new()),
            c => words.last_mut().expect("there is a word").push(c),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

#[test]
fn examples_of_help_and_documentation_are_valid() {
    let help = commands().into_iter().filter_map(|(path, command)| {
        let after = command.get_after_help()?.to_string();
        let examples = after.split("Example").nth(1)?.to_owned();
        for line in examples.lines().filter(|line| line.starts_with("  ")) {
            assert!(
                line.len() <= WIDTH,
                "`{line}` of {path} is broken into two lines"
            );
        }
        Some((path, examples))
    });
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folders = ["docs/guide", "docs/architecture"].map(|folder| root.join(folder).read_dir());
    let pages = folders
        .into_iter()
        .flat_map(|folder| folder.expect("the folder is there"));
    let pages = pages.map(|page| page.expect("a page").path());
    let pages = pages.chain([root.join("README.md")]).map(|page| {
        let text = std::fs::read_to_string(&page).expect("the page is there");
        let blocks: Vec<&str> = text.split("```").skip(1).step_by(2).collect();
        (page.display().to_string(), blocks.join("\n"))
    });
    let mut count = 0;
    for (place, text) in help.chain(pages) {
        for line in calls(&text) {
            let parsed = Arguments::command().try_get_matches_from(words(&line));
            if let Err(error) = parsed
                && error.use_stderr()
            {
                panic!("`{line}` of {place}: {error}");
            }
            count += 1;
        }
    }
    assert!(count > 90, "{count}");
}
