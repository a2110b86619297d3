package ctrd

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/fast-sandbox/fast-sandbox/internal/fault"
)

// dockerConfig is the part of Docker's config.json that holds credentials, by registry.
type dockerConfig struct {
	Auths map[string]struct {
		// Auth is base64 of user:password; Username and Password stand in for it. IdentityToken is a refresh token.
		Auth          string `json:"auth"`
		Username      string `json:"username"`
		Password      string `json:"password"`
		IdentityToken string `json:"identitytoken"`
	} `json:"auths"`
}

// readDockerConfig reads the file. A file that is missing has no credentials: the secret may come later. One that cannot
// be read is Unavailable: what is in it may be needed.
func readDockerConfig(path string) (*dockerConfig, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return &dockerConfig{}, nil
	}
	var c dockerConfig
	if err == nil {
		err = json.Unmarshal(raw, &c)
	}
	if err != nil {
		return nil, fault.Wrap(err, errdefs.ErrUnavailable, fault.ImagePullFailed, "the agent's registry credentials cannot be read")
	}
	return &c, nil
}

// credentials are user and secret for a registry's host; a refresh token comes with an empty user. Both are empty for
// a registry that the file does not know.
func (c *dockerConfig) credentials(host string) (user, secret string, err error) {
	for key, a := range c.Auths {
		if hostOf(key) != canonicalHost(host) {
			continue
		}
		switch {
		case a.IdentityToken != "":
			return "", a.IdentityToken, nil
		case a.Auth != "":
			raw, err := base64.StdEncoding.DecodeString(a.Auth)
			if err != nil {
				return "", "", fmt.Errorf("decoding the credentials of %s: %w", key, err)
			}
			user, secret, _ := strings.Cut(strings.TrimRight(string(raw), "\x00"), ":")
			return user, secret, nil
		default:
			return a.Username, a.Password, nil
		}
	}
	return "", "", nil
}

// hostOf is the host of a key, which may be a bare host or a URL.
func hostOf(key string) string {
	if _, rest, ok := strings.Cut(key, "://"); ok {
		key = rest
	}
	host, _, _ := strings.Cut(key, "/")
	return canonicalHost(host)
}

// canonicalHost gives Docker's own registry, which goes by several hosts, the one that image references name.
func canonicalHost(host string) string {
	if host == "docker.io" || strings.HasSuffix(host, ".docker.io") {
		return "docker.io"
	}
	return host
}
