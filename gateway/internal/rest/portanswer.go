package rest

import (
	"net"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
)

// dropped are the headers that a server in a sandbox may not send: what browsers take as an order about the host of the gateway, what asks for
// credentials that are the gateway's, and what the gateway itself says of every answer.
var dropped = []string{ //nolint:gochecknoglobals // constant
	"Set-Cookie", "Set-Cookie2", "Clear-Site-Data", "Strict-Transport-Security", "Public-Key-Pins", "Public-Key-Pins-Report-Only", "Service-Worker-Allowed",
	"Alt-Svc", "Refresh", "Report-To", "Reporting-Endpoints", "Nel", "Content-Security-Policy-Report-Only",
	"Www-Authenticate", "Proxy-Authenticate",
	requestIDHeader, "X-Content-Type-Options", "Cache-Control", "Expires", "Pragma",
}

// response changes the answer of a server, so that a browser does not take it for a page of the gateway.
func (f *forwarding) response(r *http.Response) error {
	h := r.Header
	for _, name := range dropped {
		h.Del(name)
	}
	for name := range h {
		if strings.HasPrefix(name, "Access-Control-") {
			h.Del(name)
		}
	}
	h.Set("Content-Security-Policy", "sandbox")
	if to := h.Get("Location"); to != "" {
		h.Del("Location")
		if to = f.location(to, f.request.Host); to != "" {
			h.Set("Location", to)
		}
	}
	if r.StatusCode == http.StatusSwitchingProtocols {
		f.exchange.code = r.StatusCode // the answer does not pass WriteHeader
		return nil
	}
	f.closeUnlessWhole(h)
	return nil
}

// location returns where a redirect leads; "" if nowhere. One of the server to itself stays below its prefix: it must not have the caller
// send the request to another method of the gateway, with the caller's credentials.
func (d destination) location(to, gateway string) string {
	ref, err := url.Parse(regexp.MustCompile(`(?i)%2e`).ReplaceAllString(to, ".")) // clients take both for dots
	if err != nil {
		return ""
	}
	web := strings.EqualFold(ref.Scheme, "http") || strings.EqualFold(ref.Scheme, "https")
	if web && (ref.Host == "" || ref.Opaque != "") {
		return "" // https:/path, which browsers take for a path of the gateway
	}
	port := strconv.Itoa(d.port)
	base := &url.URL{Scheme: "http", Host: net.JoinHostPort("localhost", port)}
	if path, err := url.PathUnescape(d.path); err == nil {
		base.Path, base.RawPath = path, d.path
	}
	u := base.ResolveReference(ref)
	own := strings.EqualFold(u.Host, gateway)
	for _, host := range []string{"localhost", "127.0.0.1", "::1"} {
		own = own || strings.EqualFold(u.Host, net.JoinHostPort(host, port))
	}
	if !own {
		return to
	}
	path := u.EscapedPath()
	if !strings.HasPrefix(path, d.prefix+"/") {
		path = d.prefix + "/" + strings.TrimPrefix(path, "/")
	}
	if u.RawQuery != "" {
		path += "?" + u.RawQuery
	}
	if u.Fragment != "" {
		path += "#" + u.EscapedFragment()
	}
	return path
}
