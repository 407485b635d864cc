//! Interfaces, the default route, and listening sockets, by the classic socket ioctls.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, UdpSocket};
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::net::{
    AddressFamily, SocketFlags, SocketType, bind, listen as start_listening, socket_with, sockopt,
};

use super::Context;

const BACKLOG: i32 = 1024;

/// Makes an interface work.
pub fn up(interface: &str) -> io::Result<()> {
    let mut request = request(interface);
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    control(libc::SIOCSIFFLAGS, &mut request).context(format_args!("{interface}: up"))
}

/// Gives an interface its address, makes it work, tells the link, and makes `gateway` the way to everywhere else.
pub fn configure(
    interface: &str,
    address: Ipv4Addr,
    prefix: u8,
    gateway: Ipv4Addr,
) -> io::Result<()> {
    // Announcing the address frees packets that wait for it on the other side, instead of the next of its requests a second later.
    let _ = fs::write(
        format!("/proc/sys/net/ipv4/conf/{interface}/arp_notify"),
        "1",
    );
    let mask = u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0);
    let settings = [
        (libc::SIOCSIFADDR, address, "address"),
        (libc::SIOCSIFNETMASK, Ipv4Addr::from_bits(mask), "netmask"),
    ];
    for (operation, value, what) in settings {
        let mut request = request(interface);
        request.ifr_ifru.ifru_addr = socket_address(value);
        control(operation, &mut request).context(format_args!("{interface}: {what} {value}"))?;
    }
    up(interface)?;
    // SAFETY: an all-zero rtentry is valid: no flags, unspecified addresses, null pointers.
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = socket_address(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    control(libc::SIOCADDRT, &mut route).context(format_args!("default route by {gateway}"))
}

/// Listens on `address`; with an interface, only to what arrives through that.
pub fn listen(address: SocketAddr, interface: Option<&str>) -> io::Result<TcpListener> {
    let family = if address.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let open = || -> rustix::io::Result<OwnedFd> {
        let socket = socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
        sockopt::set_socket_reuseaddr(&socket, true)?;
        if let Some(interface) = interface {
            bind_to_device(&socket, interface)?;
        }
        bind(&socket, &address)?;
        start_listening(&socket, BACKLOG)?;
        Ok(socket)
    };
    let place = interface
        .map(|interface| format!(" on {interface}"))
        .unwrap_or_default();
    Ok(open()
        .context(format_args!("listen at {address}{place}"))?
        .into())
}

fn bind_to_device(socket: &OwnedFd, interface: &str) -> rustix::io::Result<()> {
    let length = interface.len() as libc::socklen_t;
    // SAFETY: the kernel reads `length` bytes of `interface`.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_BINDTODEVICE,
            interface.as_ptr().cast(),
            length,
        )
    };
    if result < 0 {
        Err(
            rustix::io::Errno::from_io_error(&io::Error::last_os_error())
                .unwrap_or(rustix::io::Errno::INVAL),
        )
    } else {
        Ok(())
    }
}

/// A request about `interface`, whose name is shorter than 16 bytes.
fn request(interface: &str) -> libc::ifreq {
    // SAFETY: an all-zero ifreq is valid: an empty name, and a union of plain data.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (target, byte) in request
        .ifr_name
        .iter_mut()
        .zip(interface.bytes().take(libc::IFNAMSIZ - 1))
    {
        *target = byte as libc::c_char;
    }
    request
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0; 14];
    // After two bytes of port.
    for (target, byte) in data[2..].iter_mut().zip(address.octets()) {
        *target = byte as libc::c_char;
    }
    libc::sockaddr {
        sa_family: libc::AF_INET as libc::sa_family_t,
        sa_data: data,
    }
}

/// Any socket will do: the request names what it is about. `T` is the structure that `operation` reads.
fn control<T>(operation: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    // SAFETY: the callers pair each operation with the structure it takes, which is alive and writable.
    let result = unsafe {
        libc::ioctl(
            socket.as_raw_fd(),
            operation as libc::Ioctl,
            std::ptr::from_mut(argument),
        )
    };
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}
