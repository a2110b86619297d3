package forward

import (
	"fmt"
	"strconv"
	"strings"
)

// Mapping is a local port and the port of the sandbox that it leads to. Local is 0 for any free port.
type Mapping struct{ Local, Remote int }

// Parse returns the mapping that PORT, LOCAL:REMOTE or :REMOTE means.
func Parse(text string) (Mapping, error) {
	local, remote, two := strings.Cut(text, ":")
	if !two {
		remote = local
	}
	m := Mapping{}
	var err error
	if local != "" {
		m.Local, err = strconv.Atoi(local)
	}
	if err == nil {
		m.Remote, err = strconv.Atoi(remote)
	}
	if err != nil || m.Remote < 1 || m.Remote > 65535 || m.Local < 0 || m.Local > 65535 || strings.ContainsAny(text, "+-") {
		return Mapping{}, fmt.Errorf("invalid port %q, want PORT, LOCAL:REMOTE or :REMOTE with ports from 1 to 65535", text)
	}
	return m, nil
}
