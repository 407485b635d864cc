//! The image's accounts, read from its /etc/passwd and /etc/group by us: no libc of the image is asked.
//!
//! Two accounts exist in every image: `root`, and `user`, with uid 1000 and home /home/user when the image has none.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crate::smallfile;

/// Who a process runs as, and whose new files are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups, the primary one included.
    pub groups: Vec<u32>,
    pub home: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Account {
    name: String,
    uid: u32,
    gid: u32,
    home: PathBuf,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Group {
    name: String,
    gid: u32,
    members: Vec<String>,
}

/// What /etc/passwd and /etc/group hold at this moment. Lines that make no sense are skipped.
#[derive(Debug, Default)]
pub struct Accounts {
    accounts: Vec<Account>,
    groups: Vec<Group>,
}

impl Accounts {
    pub fn load() -> Self {
        let read = |path| smallfile::read(Path::new(path)).unwrap_or_default();
        Self::parse(&read("/etc/passwd"), &read("/etc/group"))
    }

    fn parse(passwd: &[u8], group: &[u8]) -> Self {
        let accounts = passwd
            .split(|&byte| byte == b'\n')
            .filter_map(parse_account)
            .collect();
        let groups = group
            .split(|&byte| byte == b'\n')
            .filter_map(parse_group)
            .collect();
        Self { accounts, groups }
    }

    /// Finds `name`, `uid`, `name:group` or `uid:gid`, the forms a container image's USER takes.
    ///
    /// A number needs no account: it gets group 0 and home `/`, as container engines do.
    pub fn find(&self, spec: &str) -> Option<User> {
        let (name, group) = match spec.split_once(':') {
            Some((name, group)) => (name, Some(group)),
            None => (spec, None),
        };
        let account = self.account(name)?;
        let mut groups = self.groups_of(&account.name);
        let gid = match group {
            Some(group) => {
                groups.clear();
                self.gid(group)?
            }
            None => account.gid,
        };
        if !groups.contains(&gid) {
            groups.insert(0, gid);
        }
        Some(User {
            name: account.name,
            uid: account.uid,
            gid,
            groups,
            home: account.home,
        })
    }

    /// The name of a uid, or the number itself.
    pub fn user_name(&self, uid: u32) -> String {
        let builtin = || {
            builtins()
                .into_iter()
                .find(|account| account.uid == uid)
                .map(|account| account.name)
        };
        let listed = self
            .accounts
            .iter()
            .find(|account| account.uid == uid)
            .map(|account| account.name.clone());
        listed.or_else(builtin).unwrap_or_else(|| uid.to_string())
    }

    /// The name of a gid, or the number itself.
    pub fn group_name(&self, gid: u32) -> String {
        if let Some(group) = self.groups.iter().find(|group| group.gid == gid) {
            return group.name.clone();
        }
        match gid {
            0 => "root".into(),
            1000 => "user".into(),
            _ => gid.to_string(),
        }
    }

    fn account(&self, name: &str) -> Option<Account> {
        let named = |account: &&Account| account.name == name;
        if let Some(account) = self.accounts.iter().find(named) {
            return Some(account.clone());
        }
        if let Some(account) = builtins().into_iter().find(|account| account.name == name) {
            return Some(account);
        }
        let uid: u32 = name.parse().ok()?;
        let listed = self
            .accounts
            .iter()
            .find(|account| account.uid == uid)
            .cloned();
        Some(listed.unwrap_or_else(|| Account {
            name: name.into(),
            uid,
            gid: 0,
            home: "/".into(),
        }))
    }

    fn gid(&self, group: &str) -> Option<u32> {
        let named = self
            .groups
            .iter()
            .find(|entry| entry.name == group)
            .map(|entry| entry.gid);
        named.or_else(|| group.parse().ok())
    }

    fn groups_of(&self, name: &str) -> Vec<u32> {
        let has = |group: &&Group| group.members.iter().any(|member| member == name);
        self.groups
            .iter()
            .filter(has)
            .map(|group| group.gid)
            .collect()
    }
}

fn builtins() -> [Account; 2] {
    let root_home = if Path::new("/root").is_dir() {
        "/root"
    } else {
        "/"
    };
    [
        Account {
            name: "root".into(),
            uid: 0,
            gid: 0,
            home: root_home.into(),
        },
        Account {
            name: "user".into(),
            uid: 1000,
            gid: 1000,
            home: "/home/user".into(),
        },
    ]
}

fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(field).into_owned()
}

fn number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn parse_account(line: &[u8]) -> Option<Account> {
    let fields: Vec<&[u8]> = line.split(|&byte| byte == b':').collect();
    let &[name, _, uid, gid, _, home, ..] = fields.as_slice() else {
        return None;
    };
    if name.is_empty() {
        return None;
    }
    let home = if home.is_empty() { b"/" } else { home };
    Some(Account {
        name: text(name),
        uid: number(uid)?,
        gid: number(gid)?,
        home: OsString::from_vec(home.to_vec()).into(),
    })
}

fn parse_group(line: &[u8]) -> Option<Group> {
    let fields: Vec<&[u8]> = line.split(|&byte| byte == b':').collect();
    let &[name, _, gid, members, ..] = fields.as_slice() else {
        return None;
    };
    let members = members
        .split(|&byte| byte == b',')
        .filter(|member| !member.is_empty())
        .map(text)
        .collect();
    Some(Group {
        name: text(name),
        gid: number(gid)?,
        members,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/sh\n\nbroken\nann:x:1001:1001::/home/ann:/bin/sh\nbad:x:-1:0::/:\n";
    const GROUP: &[u8] = b"root:x:0:\nann:x:1001:\nwheel:x:10:bob,ann\n";

    #[test]
    fn finds_an_account_with_its_groups() {
        let ann = Accounts::parse(PASSWD, GROUP).find("ann").unwrap();
        assert_eq!(
            (ann.uid, ann.gid, ann.home.to_str()),
            (1001, 1001, Some("/home/ann"))
        );
        assert_eq!(ann.groups, [1001, 10]);
    }

    #[test]
    fn finds_numbers_and_explicit_groups() {
        let accounts = Accounts::parse(PASSWD, GROUP);
        assert_eq!(accounts.find("1001").unwrap().name, "ann");
        let stranger = accounts.find("4242:wheel").unwrap();
        assert_eq!(
            (stranger.uid, stranger.gid, stranger.groups),
            (4242, 10, vec![10])
        );
        assert_eq!(accounts.find("ann:7").unwrap().groups, [7]);
        assert_eq!(accounts.find("ann:nobody"), None);
        assert_eq!(accounts.find("bad"), None);
        assert_eq!(accounts.find("-1"), None);
    }

    #[test]
    fn root_and_user_need_no_files() {
        let accounts = Accounts::default();
        assert_eq!(accounts.find("root").unwrap().uid, 0);
        let user = accounts.find("user").unwrap();
        assert_eq!(
            (user.uid, user.gid, user.home.to_str()),
            (1000, 1000, Some("/home/user"))
        );
        assert_eq!(accounts.user_name(1000), "user");
        assert_eq!(accounts.group_name(77), "77");
        assert_eq!(accounts.find("nobody"), None);
    }
}
