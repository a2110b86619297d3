package image

import (
	"archive/tar"
	"fmt"
	"path/filepath"
	"strings"
)

// Hostile is an image that is hostile itself.
type Hostile struct {
	Image
	// Name and Does describe it.
	Name, Does string
	// Read are the paths at which the canary might be found in a sandbox of it.
	Read []string
	// MustFail says that no sandbox can be made of it.
	MustFail bool
}

// HostileImages returns images that want to read or write the directory of the canary on the node while they are unpacked, while a
// sandbox is made of them, or in it. repository is the beginning of their references, canary the path of the canary. User `evil`
// exists only in the file passwd beside the canary.
func HostileImages(repository, canary string, program []byte) []Hostile {
	dir := filepath.Dir(canary)
	up := strings.Repeat("../", 24) + strings.TrimPrefix(dir, "/")
	base := Base(program)
	plain := base[:0:0]
	for _, e := range base { // those in which a directory is replaced
		if !strings.HasPrefix(e.Name, "devices") {
			plain = append(plain, e)
		}
	}
	list := []Hostile{
		{Name: "names that walk up", Does: "has files whose names begin with ../",
			Image: Image{Layers: [][]Entry{base, {File(up+"/written-up", "x"), File(dir+"/written-absolute", "x")}}}},
		{Name: "file through a link", Does: "has a link to a directory of the node, and a file below it", Read: []string{"/link/canary", "/relative/canary"},
			Image: Image{Layers: [][]Entry{base, {Link("link", dir), File("link/written-link", "x"), Link("relative", up), File("relative/written-relative", "x")}}}},
		{Name: "file through a link of another layer", Does: "has a link in one layer, and a file below it in the next", Read: []string{"/link/canary"},
			Image: Image{Layers: [][]Entry{base, {Link("link", dir)}, {File("link/written-layer", "x"), Dir("link/written-dir", 0o777)}}}},
		{Name: "hard links", Does: "has hard links to the canary", Read: []string{"/hard", "/hard-absolute", "/hard-link"},
			Image: Image{Layers: [][]Entry{base, {Hard("hard", up+"/canary")}}}},
		{Name: "hard links through a link", Does: "has a hard link to the canary by the way of a symbolic one", Read: []string{"/hard-link"},
			Image: Image{Layers: [][]Entry{base, {Link("link", dir), Hard("hard-link", "link/canary")}}}},
		{Name: "absolute hard links", Does: "has a hard link to the canary by its path", Read: []string{"/hard-absolute"},
			Image: Image{Layers: [][]Entry{base, {Hard("hard-absolute", canary)}}}},
		{Name: "whiteouts", Does: "deletes files of the node by whiteouts through links and of upper directories", Read: []string{"/link/canary"},
			Image: Image{Layers: [][]Entry{base, {Link("link", dir)}, {File("link/.wh.canary", ""), File("link/.wh..wh..opq", ""), File(up+"/.wh.passwd", "")}}}},
		{Name: "links where files are mounted", Does: "has links to files of the node where a sandbox's own are mounted", Read: []string{"/etc/hostname", "/etc/hosts", "/etc/resolv.conf"},
			Image: Image{Layers: [][]Entry{plain, {Link("etc/hostname", canary), Link("etc/hosts", dir+"/written-hosts"), Link("etc/resolv.conf", up+"/written-resolv")}}}},
		{Name: "a link in place of /proc", Does: "has a link to a directory of the node where /proc is mounted", MustFail: true, Read: []string{"/proc/canary"},
			Image: Image{Layers: [][]Entry{without(plain, "proc/"), {Link("proc", dir)}}}},
		{Name: "a link in place of /dev", Does: "has a link to a directory of the node where /dev is mounted", MustFail: true, Read: []string{"/dev/canary"},
			Image: Image{Layers: [][]Entry{without(plain, "dev/"), {Link("dev", dir)}}}},
		{Name: "a link in place of /sys", Does: "has a link to a directory of the node where /sys is mounted", MustFail: true, Read: []string{"/sys/canary"},
			Image: Image{Layers: [][]Entry{without(plain, "sys/"), {Link("sys", up)}}}},
		{Name: "a link in place of /etc", Does: "has a link to a directory of the node where a sandbox's own files are mounted", Read: []string{"/etc/canary"},
			Image: Image{Layers: [][]Entry{withoutBelow(plain, "etc/"), {Link("etc", dir)}}}},
		{Name: "a user of the node", Does: "has a link to a passwd file of the node, which has its user", MustFail: true,
			Image: Image{User: "evil", Layers: [][]Entry{plain, {Link("etc/passwd", dir+"/passwd")}}}},
	}
	for _, file := range []string{"passwd", "group"} {
		special := []Entry{FIFO("etc/" + file), Device("etc/"+file, tar.TypeChar, 1, 5), Dir("etc/"+file, 0o755), File("etc/"+file, strings.Repeat("x:x:1:\n", 1<<18)), Link("etc/"+file, "/dev/zero")}
		for j, what := range []string{"a FIFO", "a device", "a directory", "a huge file", "a link to a device"} {
			list = append(list, Hostile{Name: fmt.Sprintf("%s in place of /etc/%s", what, file), Does: "wants the agent to read it forever", MustFail: true,
				Image: Image{User: "user", Layers: [][]Entry{without(plain, "etc/"+file), {special[j]}}}})
		}
	}
	for i := range list {
		list[i].Ref = fmt.Sprintf("%s-hostile-%d:dev", repository, i)
		list[i].Entrypoint = []string{"/hostile"}
	}
	return list
}

// withoutBelow returns the entries but those of a directory.
func withoutBelow(entries []Entry, dir string) []Entry {
	var out []Entry
	for _, e := range entries {
		if !strings.HasPrefix(e.Name, dir) {
			out = append(out, e)
		}
	}
	return out
}

// without returns the entries but one.
func without(entries []Entry, name string) []Entry {
	var out []Entry
	for _, e := range entries {
		if e.Name != name {
			out = append(out, e)
		}
	}
	return out
}
