//! What the documentation refers to is there.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The project's texts, which are not all in every package that could be made of it.
fn texts(root: &Path) -> Vec<PathBuf> {
    let mut folders = vec![root.to_owned(), root.join("docs")];
    let mut texts = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && folder != root {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                texts.push(path);
            }
        }
    }
    texts
}

/// Without code, in which brackets are no links.
fn prose(text: &str) -> String {
    let mut is_code = false;
    let mut prose = String::new();
    for line in text.lines() {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        if !is_code && !is_fence {
            // Every other part is between back quotes.
            for part in line.split('`').step_by(2) {
                prose += part;
                prose.push('`');
            }
            prose.push('\n');
        }
    }
    prose
}

/// What follows `](`, to the closing bracket.
fn links(prose: &str) -> impl Iterator<Item = &str> {
    prose.split("](").skip(1).filter_map(|rest| rest.split_once(')')).map(|(link, _)| link)
}

/// What headings are called in links.
fn anchors(text: &str) -> BTreeSet<String> {
    let mut is_code = false;
    let headings = text.lines().filter(move |line| {
        is_code ^= line.starts_with("```");
        !is_code && line.starts_with('#')
    });
    let slug = |heading: &str| {
        let kept = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = kept.chars().filter(|letter| letter.is_alphanumeric() || " -_".contains(*letter));
        kept.map(|letter| if letter == ' ' { '-' } else { letter }).collect()
    };
    headings.map(slug).collect()
}

#[test]
fn links_between_documents_lead_somewhere() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let (mut count, mut dead) = (0, Vec::new());
    for document in texts(&root) {
        let text = fs::read_to_string(&document).unwrap();
        for link in links(&prose(&text)).filter(|link| !link.contains("://")) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => document.clone(),
                file => document.parent().unwrap().join(file),
            };
            let is_there = target.exists()
                && (anchor.is_empty() || anchors(&fs::read_to_string(&target).unwrap()).contains(anchor));
            count += 1;
            if !is_there {
                dead.push(format!("{}: {link}", document.strip_prefix(&root).unwrap().display()));
            }
        }
    }
    assert!(count > 100, "only {count} links were found");
    assert!(dead.is_empty(), "{dead:#?}");
}

#[test]
fn links_and_headings_are_recognised() {
    let text = "# The `word` of a lock, or semaphore\n[here](a.md#b) `[not](here)`\n```\n[nor](there)\n# no heading\n```\n[x](#y) [z](../z)";
    assert_eq!(links(&prose(text)).collect::<Vec<_>>(), ["a.md#b", "#y", "../z"]);
    assert_eq!(anchors(text).into_iter().collect::<Vec<_>>(), ["the-word-of-a-lock-or-semaphore"]);
}
