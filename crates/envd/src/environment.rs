//! What a request may leave unsaid: its user, what its relative paths mean, and the environment of what it starts.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::users::User;

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// The absolute path a request means: `~` is the user's home, a relative path starts there, `""` is the default directory, and
/// the home without one. Purely textual: nothing is looked up, and `..` is left to the kernel.
pub fn resolve(path: &str, user: &User, default: Option<&str>) -> PathBuf {
    let path = if path.is_empty() {
        default.unwrap_or("~")
    } else {
        path
    };
    match path.strip_prefix('~') {
        Some("") => user.home.clone(),
        Some(rest) if rest.starts_with('/') => user.home.join(rest.trim_start_matches('/')),
        _ => user.home.join(Path::new(path)),
    }
}

/// The environment of a process: account, then sandbox, then request; a later one wins.
pub fn variables(
    user: &User,
    sandbox: &BTreeMap<String, String>,
    request: impl IntoIterator<Item = (String, String)>,
) -> BTreeMap<String, String> {
    let account = [
        ("PATH", PATH.to_owned()),
        ("HOME", user.home.to_string_lossy().into_owned()),
        ("USER", user.name.clone()),
        ("LOGNAME", user.name.clone()),
    ];
    let account = account.map(|(name, value)| (name.to_owned(), value));
    let sandbox = sandbox
        .iter()
        .map(|(name, value)| (name.clone(), value.clone()));
    account.into_iter().chain(sandbox).chain(request).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user() -> User {
        User {
            name: "ann".into(),
            uid: 1,
            gid: 1,
            groups: vec![1],
            home: "/home/ann".into(),
        }
    }

    #[test]
    fn paths_resolve_like_a_shell_would() {
        let cases = [
            ("", None, "/home/ann"),
            ("", Some("/srv"), "/srv"),
            ("", Some("work"), "/home/ann/work"),
            ("a/b", Some("/srv"), "/home/ann/a/b"),
            ("~", Some("/srv"), "/home/ann"),
            ("~/x", None, "/home/ann/x"),
            ("~bob/x", None, "/home/ann/~bob/x"),
            ("/etc/../x", None, "/etc/../x"),
        ];
        for (path, default, expected) in cases {
            assert_eq!(
                resolve(path, &user(), default),
                Path::new(expected),
                "{path:?}"
            );
        }
    }

    #[test]
    fn the_request_has_the_last_word() {
        let sandbox = BTreeMap::from([("A".into(), "1".into()), ("HOME".into(), "/h".into())]);
        let found = variables(&user(), &sandbox, [("A".into(), "2".into())]);
        assert_eq!(found["A"], "2");
        assert_eq!(found["HOME"], "/h");
        assert_eq!(found["LOGNAME"], "ann");
    }
}
