// Command sandbox-helper serves calls about the files and ports of a sandbox, in the sandbox and as one of its users. The supervisor of the sandbox
// starts it for the first call of a user, and passes it the connections of the agent over the socket that it has as descriptor 3. It ends when it has had
// none for a while.
package main

import (
	"errors"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fast-sandbox/fast-sandbox/agent/internal/files"
	"github.com/fast-sandbox/fast-sandbox/internal/config"
)

const (
	controlFD = 3
	// idleTime is how long it waits for another connection.
	idleTime = 30 * time.Second
)

func main() {
	// Other processes of its user may end it, but not look into it.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		os.Exit(1)
	}
	unix.Umask(0o022)
	control, err := connOf(controlFD)
	if err != nil {
		os.Exit(1)
	}
	serve(control, config.Env("HOME"))
}

// connOf makes a descriptor of a unix socket a connection, and closes the descriptor: the connection has a copy. An os.File closes its descriptor
// also when it is collected, so that no other code may close that: it would be another file by then.
func connOf(fd int) (*net.UnixConn, error) {
	f := os.NewFile(uintptr(fd), "connection")
	defer f.Close()
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	unixConn, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, errors.Join(syscall.ENOTSOCK, conn.Close())
	}
	return unixConn, nil
}

// serve serves what the supervisor passes, until there was nothing for a while.
func serve(control *net.UnixConn, home string) {
	var active atomic.Int32
	for {
		if control.SetReadDeadline(time.Now().Add(idleTime)) != nil {
			return
		}
		conn, err := receive(control)
		if err != nil {
			if e, ok := err.(net.Error); ok && e.Timeout() && active.Load() > 0 { //nolint:errorlint // it is one
				continue
			}
			return
		}
		if conn == nil {
			continue
		}
		active.Add(1)
		go func() {
			defer active.Add(-1)
			files.Serve(conn, home)
		}()
	}
}

// receive returns the next connection; nil if none came with a message.
func receive(control *net.UnixConn) (*net.UnixConn, error) {
	var b [1]byte
	rights := make([]byte, unix.CmsgSpace(4))
	n, length, _, _, err := control.ReadMsgUnix(b[:], rights)
	if err != nil {
		return nil, err
	}
	if n == 0 {
		return nil, syscall.ECONNRESET // the supervisor has ended
	}
	messages, err := unix.ParseSocketControlMessage(rights[:length])
	if err != nil || len(messages) == 0 {
		return nil, nil //nolint:nilerr,nilnil // nothing came
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil || len(fds) == 0 {
		return nil, nil //nolint:nilerr,nilnil // the same
	}
	conn, err := connOf(fds[0])
	if err != nil {
		return nil, nil //nolint:nilerr,nilnil // the agent asks again
	}
	return conn, nil
}
